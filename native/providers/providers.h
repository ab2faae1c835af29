/* The providers by name, of which the transport takes one for each link. */
#pragma once

#include "../verbs/verbs.h"

/* The software provider: as it is, and as it emulates another device ("apple-tb5" ...:
 * soft/emulation/device_profile.h). NULL for any other name. */
const struct verbs* verbs_soft(void);
const struct verbs* verbs_soft_profile(const char* name);

/* "soft", "ibverbs" or "librdma"; NULL where there is no such provider here, and a sentence in `why`. `soft_profile`
 * counts for "soft". */
const struct verbs* verbs_provider(const char* name, const char* soft_profile, char* why, size_t bytes);
