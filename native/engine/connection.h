/*
 * Connections: how two ranks get ready to send to each other.
 *
 * In small worlds every pair is connected at the start, with addresses that the caller exchanges. In larger ones a
 * pair is connected when an operation first needs it: either side sends its address through the side channel; who
 * gets one connects, posts its receives, answers with its own, and says when it is ready.
 */
#pragma once

#include "operation.h"

/* Connects all peers that the operation has transfers with, and waits for them. */
int connection_make_all(struct operation* operation);
