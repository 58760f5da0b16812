"""What ``kvpager bench`` measures: kernels against the memory's speed, and where a decode step's time goes.

Start with :func:`kvpager.bench.kernel.measure` and :func:`kvpager.bench.step.split`. Every time is the median of
several, taken in turns with the times that it is compared to, since a machine's bandwidth can change within seconds.
"""
