"""What a run means, as one page."""
