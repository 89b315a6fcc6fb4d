"""Benchmarks: figures for notes, never for tests."""
