"""Many requests at once on a fixed memory: requests, a scheduler, one ragged batch a step, sampling."""
