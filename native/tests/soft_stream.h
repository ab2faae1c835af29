/* A stream of checked messages in both directions at once, with credits, for the provider's stress tests. */
#pragma once

#include "soft_side.h"

#define STREAM_OPTIONS ((struct side_options){.cqe = 128, .max_send_wr = 32, .max_recv_wr = 32})

/* Posts the receives; after this the peer may run its stream. */
void stream_prepare(struct side* side);

/* Sends `messages` (a multiple of 8) messages and receives as many, whose order, sizes and bytes are checked,
 * and then checks the provider's counters. The peer does the same. */
void stream_run(struct side* side, uint32_t messages);

/* Messages to run in each direction: half of MESSAGES of the environment, a multiple of 8; else `otherwise`. */
uint32_t stream_messages(uint32_t otherwise);

/* Tells the other side, at the other end of a socket, this one's address, and returns the other's. A barrier, too. */
struct side_address stream_exchange(int fd, const struct side* side);

/* Runs both sides, each with its end of a socket. Between threads the thread sanitizer sees both. */
void stream_in_two_processes(void (*run_side)(int fd));
void stream_in_two_threads(void (*run_side)(int fd));
