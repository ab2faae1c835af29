"""`mlxdist launch`: starts the ranks of a job, supervises them, and leaves nothing behind.

    options.py      the options of the command line (mlxdist.cli.launch)
    run.py          from the start of a job to its end, and again after a failure; restarts.py the pauses in between
    run_job.py      runs a job for another command, and waits for it
    local.py        a job on this machine: what its ranks are given, and how they are started
    hosts.py        a job on several hosts; remote.py one of them, over a connection of mlxdist.cluster.ssh,
                    where agent.py starts the ranks
    nodes.py        a launcher on each node, started by a scheduler or by hand: --nodes, srun
    backends.py     what MLX's own backends find in their environment; mpirun.py: --backend mpi
    executable.py   whether a command can be run
    supervisor.py   signals, the first failure, the time for the others to leave; wakeup.py signals beside descriptors
    exit_status.py  exit statuses of ranks and of the launcher
    output.py       what the ranks print: writer.py a thread that writes it, tracebacks.py those of several ranks,
                    last_lines.py those of a rank that failed, terminal.py colors and widths
    standard_input.py   what the ranks read; run.py and the agent feed them
    reaper.py       a process that cleans up, also after a launcher that was killed
    stale_jobs.py   removes what is left of jobs whose launcher and reaper were both killed
    jobs.py         which jobs run here, in the runtime_directory.py; launcher_records.py: their hosts, and what is
                    started next; jobs_on_hosts.py those of several hosts; job_name.py: how commands name a job
    jit_cache.py    the JIT cache: directories for the kernels that MLX compiles
    awake.py        keeps a Mac from falling asleep
    processes.py    which process a number means

It runs without MLX, NumPy and the engine, so that it starts fast. Of the compiled half it only looks at the MPI shim.
"""
