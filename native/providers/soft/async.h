/* Asynchronous events. */
#pragma once

#include "soft.h"

/* From now on the context's async_fd is readable when there is an event. 0 or an errno value. */
int soft_async_start(struct soft_context* context);
void soft_async_stop(struct soft_context* context);
void soft_async_raise(struct soft_context* context, struct ibv_async_event event);
int soft_async_get(struct soft_context* context, struct ibv_async_event* event); /* -1 with errno, as the library */
void soft_async_acknowledge(struct soft_context* context, const struct ibv_async_event* event);
/* Before the queue or queue pair is destroyed: forgets its events, and waits for those that were taken to be
 * acknowledged. */
void soft_async_settle(struct soft_context* context, const void* element);
