"""`mlxdist launch`: starts the ranks of a job, supervises them, and leaves nothing behind.

    command.py      the command line; options.py its options, and what is read from them
    local.py        a job on this machine: what its ranks are given, and how they are started
    run.py          from the start of a job to its end, and again after a failure
    hosts.py        a job on several hosts; remote.py one of them, at the other end of an ssh connection, where
                    agent.py starts the ranks; frames.py is what they say to each other
    backends.py     what MLX's own backends find in their environment; mpirun.py: --backend mpi
    nodes.py        a launcher on each node, started by somebody else: --nodes, srun
    standard_input.py   what the ranks read; run.py and the agent feed them
    supervisor.py   signals, the first failure, the exit status
    output.py       what the ranks print
    restarts.py     starts the job again after a failure
    reaper.py       a process that cleans up, also after a launcher that was killed
    jobs.py         which jobs run here, in runtime_folder.py's directory; job_hosts.py: the hosts of one, as the
                    launcher's machine knows them; jobs_on_hosts.py asks them; job_name.py: how commands
                    name a job; ps.py and stop.py are commands; stale_jobs.py removes what is left of jobs that
                    were killed with their reaper
    jit_cache.py    directories for the kernels that MLX compiles

It runs without MLX, NumPy and the engine, so that it starts fast. Of the compiled half it only looks at the MPI door.
"""
