"""Solvers: one file each, one signature: an `Instance` in, an `Assignment` out.

`exact` is the planner's; `grid` is what people do by hand, and its baseline; `miqp` is UniAP as
written, the judge of `exact`. The others are peers' (`known.SOLVERS` lists all).
"""
