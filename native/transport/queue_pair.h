/* The queue pair of a channel: how it is made and connected. */
#pragma once

#include "channel.h"

/* From nothing to INIT, with queues for twice the slots. Memory is registered after this. */
int queue_pair_create(struct channel* channel);

/* 0 or an errno value; 0, too, where there is none. */
int queue_pair_destroy(struct channel* channel);

/* To RTR and RTS. */
int queue_pair_connect(struct channel* channel, const union ibv_gid* gid, uint16_t lid, uint32_t qp_num,
                       uint32_t remote_psn, uint32_t local_psn);

/* TRANSPORT, for a verb that has failed. */
int queue_pair_fail(const struct channel* channel, const char* verb, int error);
