/* The side channel: how bytes reach a peer that no queue pair reaches now. Its functions are called without the lock,
 * which it must not wait for. */
#pragma once

#include "engine.h"

/* Sends the peers the addresses of queue pairs that were re-created. */
void side_channel_send_reconnects(struct engine* engine);

/* A message of the side channel. False if it is none of a reconnect. */
bool side_channel_receive_reconnect(struct engine* engine, struct peer* peer, const void* bytes, uint64_t length);
