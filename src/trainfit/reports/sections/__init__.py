"""The parts of a report, a file each: from a run as it was read to what there is to see of it."""
