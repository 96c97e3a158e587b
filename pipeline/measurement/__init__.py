"""Clocks, statistics of latencies, and how two engines compare.

Two functions, timed in one process:

    from pipeline.measurement.clock import WarmUpOptions, measure_block
    from pipeline.measurement.clock import samples_from_blocks, warm_up
    from pipeline.measurement.statistics import ratio_of_medians

    runs = {"before": lambda: sum(range(20_000)), "after": lambda: sum(range(10_000))}
    blocks = {name: [] for name in runs}
    for run in runs.values():
        warm_up(run, WarmUpOptions())
    for _ in range(6):
        for name, run in runs.items():  # in random order if it matters
            blocks[name].append(measure_block(run, min_s=0.05))
    before, after = (samples_from_blocks(blocks[name], ()) for name in runs)
    ratio = ratio_of_medians(before, after)
    print(f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})")
"""
