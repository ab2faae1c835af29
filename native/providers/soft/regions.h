/* What peers see of memory regions, and when the last one of them has left. */
#pragma once

#include "soft.h"

void soft_publish_region(const struct soft_mr* mr);
/* After this no peer writes to the region: EBUSY if one was stopped in the middle of it. */
int soft_withdraw_region(const struct soft_mr* mr);
/* After this no peer writes through the queue pair, whose claim is closed; false if one was stopped in the middle. */
bool soft_wait_for_writers(const struct shared_queue_pair* shared);
