"""`mlxdist calibrate`: measures each host and the links, the fastest algorithms, and the cost of token exchanges.

measure.py runs on every host, ranks.py in the ranks of a job; hosts.py and algorithms.py judge and show the results.
"""
