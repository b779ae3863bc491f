"""The measurements of ``engine bench``: parts of a run, alone, on the workers that the run file names."""
