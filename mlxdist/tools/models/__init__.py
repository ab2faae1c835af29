"""Models as files: `mlxdist pull` brings them to hosts, `mlxdist models` lists them, `mlxdist tiny-model` makes them.

pull.py         the command's side: jobs on the hosts; pull_rank.py: the ranks of these jobs
only_shards.py  what hosts get that are to have just the shards that their ranks read
fetch.py        a download from the hub; spread.py: from host to host, transfer.py: one file
places.py       the files of a model on a host, in a folder or in the hub's cache
inventory.py    the models on this host and on others
tiny_model.py   a small model with random weights; small_config.py: its sizes
"""
