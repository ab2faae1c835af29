/*
 * Keepalive, the heartbeat of a queue pair: one that sends nothing for long may stop carrying anything, as
 * Thunderbolt's do after about 23 minutes, and says nothing about it. So each of them, bulk too, sends a message of
 * kind ACK after options.keepalive seconds without another.
 *
 * It is sent when nothing is on its way, so it cannot come between messages. On the bulk channel it takes a receive
 * that was meant for data and is posted again at once: until the peer says so the window is smaller by one.
 *
 * And on a port whose cable was pulled Apple's library crashes in a post: before the first message of an idle channel
 * the port is looked at.
 */
#pragma once

#include "endpoint.h"

/* Requests a reply from the peer, which its progress thread sends whatever its program does. Both may be lost. */
int keepalive_probe(struct endpoint* endpoint);

/* Of the timers: sends one if it is time. */
int keepalive_tick(struct channel* channel, uint64_t now_ns);
