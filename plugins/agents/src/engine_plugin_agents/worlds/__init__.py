"""Processes of worlds: started by path, in another interpreter; its modules import no package of Engine."""
