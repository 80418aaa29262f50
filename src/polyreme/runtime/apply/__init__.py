"""How an axis is applied to modules: one file an axis, named as in planner/cost."""
