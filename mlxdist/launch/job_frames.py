"""Frames that the launcher and a host's agent send each other."""

from enum import IntEnum

from mlxdist.cluster.ssh.protocol import FIRST_STREAM_KIND

__all__ = ["AGENT", "JobFrame"]

AGENT = "launch.agent"  # the call's name


class JobFrame(IntEnum):
    """Frames between this call and its result, which names the directory of recordings once no process is left."""

    # launcher to agent
    START = FIRST_STREAM_KIND  # JSON: the address of rank 0
    SIGNAL = 17  # a number in one byte, to one rank
    INPUT = 18  # what the ranks read; empty: the end
    END = 19  # end whatever is left of the job on this host
    PING = 20  # the launcher lives; the agent answers with PONG
    GONE = 21  # JSON: the exit status of a rank of another host
    EPOCH = 22  # JSON: a smaller or larger world of the job (elastic.py), for all ranks that wait for it
    ANSWER = 23  # the last one again, for one rank
    REFUSED = 24  # JSON: why a rank that asks for one gets none
    JOIN = 25  # start a rank that joins the job
    JOINING = 26  # whether processes wait to join, in one byte
    # agent to launcher
    READY = 32  # JSON: where rank 0 will listen, if it is here; free ports; the directory of the ranks
    OUT = 33  # what a rank has printed; empty: it has closed the stream
    ERR = 34
    EXIT = 35  # JSON: the exit status of a rank, as a shell has it, and which rank failed first, if that is known here
    INPUT_ACK = 36  # a rank has read its input as far as it was sent; not empty: none will read any more
    FAILED = 37  # JSON: the job cannot run here
    STOPPED = 38  # a number in one byte: the signal that makes the agent leave
    PONG = 39
    QUESTION = 40  # JSON: a rank asks for another world, or does not any more
