"""`mlxdist calibrate`: how fast each host computes, reads its memory and talks to the others.

measure.py runs on every host, link_rank.py as a rank on each, figures.py judges what comes back, command.py shows it.
"""
