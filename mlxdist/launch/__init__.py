"""`mlxdist launch`: starts the ranks of a job, supervises them, and leaves nothing behind.

    command.py      the command line
    local.py        a job on this machine: what its ranks are given, and how they are started
    run.py          from the start of a job to its end, and again after a failure
    hosts.py        a job on several hosts; remote.py one of them, at the other end of an ssh connection, where
                    agent.py starts the ranks; frames.py is what they say to each other
    standard_input.py   what rank 0 reads, where that is on another host
    supervisor.py   signals, the first failure, the exit status
    output.py       what the ranks print
    restarts.py     starts the job again after a failure
    keeper.py       a process that cleans up, also after a launcher that was killed
    jobs.py         which jobs run here; ps.py and stop.py are commands; leftovers.py removes what is left of those that
                    were killed with their keeper
    jit_cache.py    folders for the kernels that MLX compiles

It runs without MLX, NumPy and the engine, so that it starts fast. Of the compiled half it only looks at the MPI door.
"""
