/* The receiving half of a queue pair. */
#pragma once

#include "tcp.h"

struct tcp_receiver* tcp_receiver_create(int fd, uint64_t now);
void tcp_receiver_close(struct tcp_receiver* receiver); /* the memory stays */
/* Whether the queue pair is the one that this connection was made for. */
bool tcp_receiver_serves(const struct tcp_receiver* receiver, const struct soft_qp* qp);
void tcp_receiver_progress(struct soft_context* context, struct tcp_receiver* receiver, short events, uint64_t now);
