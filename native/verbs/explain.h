/* What the error number of a verb means, in words and for RDMA. */
#pragma once

#include <stddef.h>

#define VERBS_EXPLANATION_BYTES 512 /* the longest has room */

/* "Cannot allocate memory: WHAT IT MEANS FOR THIS VERB; WHAT TO DO"; only the former where there is nothing to add.
 * `verb`: "alloc_pd", "reg_mr" ...; modify_qp with the state it goes to, "modify_qp to RTR". `error`: what the verb
 * returned, or left in errno; 0 if it failed without a reason. The TCP connections of the
 * software provider are made by the verb "connect". */
void verbs_explain(const char* verb, int error, char* text, size_t bytes);

/* What to do about a port that modify_qp to RTR rejects, as its explanation has it. */
const char* verbs_port_remedy(void);
