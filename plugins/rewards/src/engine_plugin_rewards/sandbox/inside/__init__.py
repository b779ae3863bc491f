"""The process in the box. It is started by path and without site packages; its modules import each
other by bare name.
"""
