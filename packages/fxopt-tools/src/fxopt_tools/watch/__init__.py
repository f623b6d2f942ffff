"""Instruments that watch every pass: times, statistics, dumps."""
