"""The process in the box: started by path, without site packages; its modules import each other by bare name."""
