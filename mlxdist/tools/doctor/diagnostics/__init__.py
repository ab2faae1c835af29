"""`mlxdist doctor --report FILE`: what a maintainer needs to know of hosts that only a volunteer can reach.

command.py     section after section, each within its time; the file
sections.py    what is in the report
runs.py        jobs with every verb traced, and their flight records; rdma_runs.py: which of them use RDMA
late_rank.py   what the ranks of the sleep probe run
document.py    Markdown and JSON, bounded
redact.py      what must not be shared, replaced
"""
