"""What ``engine bench`` measures: parts of a run, alone, on the workers that the run file names."""
