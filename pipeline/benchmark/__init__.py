"""Measuring engines: interleaved processes, elimination, batch sweeps, peaks and rooflines."""
