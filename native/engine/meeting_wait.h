/* Meetings (meeting.h), seen from the threads that come to operations: they count, request, reply and wait. */
#pragma once

#include "operation.h"

/* With the lock: a message that says where ranks have come to is leaving. */
static inline void meeting_count_message(struct engine* engine) { count(&engine->counters.meeting_messages, 1); }

/* Counts an operation that is called directly, and replies to the peers that wait for it. */
void meeting_count(struct operation* operation);

/* A request or reply that came by the side channel: two ranks need not be connected. Returns false if it is none. */
bool meeting_receive(struct engine* engine, struct peer* peer, const void* bytes, uint64_t length);
