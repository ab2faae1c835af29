#include "explain.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define ANY "" /* every verb without an entry of its own */
#define NO_REASON 0

#define QUEUE_PAIRS                                                                                                    \
  "all queue pairs of the device are in use, by this process or others; end what else uses it (ranks of an earlier "   \
  "job, too), or start fewer ranks (RDMA over Thunderbolt has 10 per device, 3 on macOS 27)"
#define DOMAINS                                                                                                        \
  "no protection domain is left, or the port is down; check the cable and that RDMA is enabled at both ends; " LOST
#define LOST /* mlxdist/launch/reaper.py */                                                                            \
  "a Mac has 11 protection domains of RDMA and keeps those of killed programs until it is restarted (while no job "    \
  "runs, `ioclasscount AppleThunderboltRDMAProtectionDomain` counts them)"
#define REGIONS "no memory region of the device is left (RDMA over Thunderbolt has 100 per device)"
#define LOCKED_MEMORY                                                                                                  \
  "more memory than this process may lock; raise the limit (ulimit -l unlimited; in a container --ulimit memlock=-1)"
#define OTHER_TYPE "the device has no queue pairs of this type; choose the other one (MLXDIST_QP_TYPE=uc or rc)"
#define PORT_REMEDY                                                                                                    \
  "`mlxdist config --hosts HOST,... --auto-setup --without-bridge` gives each port with a cable an IPv4 address of "   \
  "its own and takes it out of bridge0 (Thunderbolt Bridge)"
#define GID                                                                                                            \
  "the address or its index in the table is wrong, as after a change of network addresses (`mlxdist devices` shows "   \
  "them), or the port of a Mac is in bridge0 or has no IPv4 address: " PORT_REMEDY
#define NO_ROUTE "the peer's address cannot be reached; check that both ports are up and in the same subnet (ping it)"
#define IDLE                                                                                                           \
  "the link was idle for too long, or queue pairs and protection domains are used up; start again, and if that does "  \
  "not help restart this machine"
#define PERMISSION                                                                                                     \
  "this user may not use RDMA devices; give it read and write access to /dev/infiniband/uverbs* (group rdma or root)"
#ifdef __APPLE__ /* TN3179 */
#define NO_WAY                                                                                                         \
  "if ping reaches it, macOS denies this program the local network: allow the application that started it in System "  \
  "Settings > Privacy & Security > Local Network (an editor's terminal needs that, and what an ssh session has left "  \
  "behind when it ended; Terminal and ssh sessions do not)"
#else
#define NO_WAY "no route leads to the peer's address; check that its interface is up and in the same subnet (ping it)"
#endif
#define FIREWALL "nothing answers at the peer's address; check the network (ping it), and let a firewall pass TCP"
#define GONE "the device is gone or does not answer; check the cable and the system's log (dmesg)"

static const struct meaning {
  const char *verb;
  int error;
  const char *text;
} meanings[] = {
    {"open_device", EACCES, PERMISSION},
    {"open_device", EPERM, PERMISSION},

    {"alloc_pd", NO_REASON, DOMAINS},
    {"alloc_pd", ENOMEM, DOMAINS},
    {"alloc_pd", EBUSY, DOMAINS},
    {"alloc_pd", ENODATA, IDLE},

    {"reg_mr", ENOMEM, LOCKED_MEMORY "; or " REGIONS},
    {"reg_mr", EAGAIN, LOCKED_MEMORY},
    {"reg_mr", EFAULT, "the buffer is not mapped, or cannot be written"},
    {"reg_mr", EINVAL, "the buffer is longer than the device takes, or the device refuses this kind of access"},
    {"reg_mr", ENOSPC, REGIONS},

    {"create_cq", ENOMEM, LOCKED_MEMORY},
    {"create_cq", EINVAL, "more entries than the device allows; lower MLXDIST_EAGER_SLOTS and MLXDIST_BULK_SLOTS"},

    {"create_qp", EBUSY, QUEUE_PAIRS},
    {"create_qp", ENOSPC, QUEUE_PAIRS},
    {"create_qp", ENODATA, QUEUE_PAIRS},
    {"create_qp", ENOMEM, QUEUE_PAIRS "; or it is " LOCKED_MEMORY},
    {"create_qp", EINVAL, "deeper queues than the device allows; lower MLXDIST_EAGER_SLOTS and MLXDIST_BULK_SLOTS"},
    {"create_qp", EOPNOTSUPP, OTHER_TYPE},
    {"create_qp", ENOTSUP, OTHER_TYPE},
    {"create_qp", ENOSYS, OTHER_TYPE},

    {"modify_qp to RTR", EINVAL, GID},
    {"modify_qp to RTR", ENOENT, GID},
    {"modify_qp to RTR", ETIMEDOUT, NO_ROUTE},
    {"modify_qp to RTR", EHOSTUNREACH, NO_ROUTE},
    {"modify_qp to RTR", ENETUNREACH, NO_ROUTE},
    {"modify_qp to RTR", EADDRNOTAVAIL, NO_ROUTE},
    {"modify_qp to RTR", ENODATA, IDLE},
    {"modify_qp to RTR", EBUSY, "what an earlier program left of its queue pairs is in the way; restart this machine"},

    {"connect", EHOSTUNREACH, NO_WAY},
    {"connect", ENETUNREACH, NO_WAY},
    {"connect", ETIMEDOUT, FIREWALL},

    {"post_send", ENOMEM, "the send queue is full: the device stopped sending"},
    {"post_send", EINVAL, "the queue pair is not connected any more"},
    {"post_recv", ENOMEM, "the receive queue is full"},
    {"post_recv", EINVAL, "the queue pair is not connected any more"},

    {ANY, ENODEV, GONE},
    {ANY, ENXIO, GONE},
    {ANY, EIO, GONE},
    {ANY, ENETDOWN, "the port is down; check the cable, and that the interface is up at both ends"},
    {ANY, EMFILE, "too many files are open in this process; raise the limit (ulimit -n)"},
};

const char *verbs_port_remedy(void) { return PORT_REMEDY; }

static const char *find(const char *verb, int error) {
  for (size_t i = 0; i < sizeof meanings / sizeof *meanings; i++)
    if (meanings[i].error == error && strcmp(meanings[i].verb, verb) == 0) return meanings[i].text;
  return NULL;
}

/* Some verbs of some libraries return -1, and others the negative number. */
void verbs_explain(const char *verb, int error, char *text, size_t bytes) {
  if (error < 0) error = error == -1 ? NO_REASON : -error;
  const char *meaning = find(verb, error);
  if (!meaning) meaning = find(ANY, error);
  const char *name = error ? strerror(error) : "the provider gives no reason";
  snprintf(text, bytes, "%s%s%s", name, meaning ? ": " : "", meaning ? meaning : "");
}
