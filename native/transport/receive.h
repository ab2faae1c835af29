/* The receiving half of a channel: what arrives is checked, and its acknowledgements read, before the owner sees it. */
#pragma once

#include "channel.h"

/* When the queue pair is in RTS (queue_pair.h): posts every receive slot. */
int receive_post_all(struct channel* channel);

/* A receive has completed: checks the message, and hands it to the owner. */
int receive_complete(struct channel* channel, uint32_t slot, uint32_t byte_len);

/* Gives the slot of an arrived message back to the peer, or its memory to the system. */
int recv_release(struct recv_desc* desc);

/* Copies an arrived message out of its slot, which is then the peer's again. */
int recv_spill(struct recv_desc** desc);

/* Whether messages that have arrived fill the slots, so that others could not get past. */
static inline bool receive_is_crowded(const struct channel* channel) {
  return channel->outstanding < channel->slots / 2;
}
