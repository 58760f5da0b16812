"""How good answers stay under paging: tasks, and figures that compare a run with the full cache.

`echo` is the task of ``kvpager eval echo``, `codes` that of ``kvpager demo``; `figures` has losses and divergences,
`belady` the fewest recalls that any eviction policy could have reached, `plots` the pictures.
"""
