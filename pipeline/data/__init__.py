"""Calibration, selection and validation samples."""
