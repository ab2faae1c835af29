/* Completion statuses in words. */
#pragma once

#include "verbs_abi.h"

/* The status' name without IBV_WC_, a colon, and what it means: "LOC_LEN_ERR: the message was longer ...".
 * Every value has a text, one that no provider should send too. */
const char* verbs_wc_status_name(enum ibv_wc_status status);
