"""The ladder of optimizations: one at a time, each measured."""
