/* What depends on the version of macOS, in RDMA over Thunderbolt. */
#ifndef MLXDIST_VERBS_APPLE_H
#define MLXDIST_VERBS_APPLE_H

#include <stdint.h>

/* The largest message, hence the largest buffer to post, under a version of macOS such as "26.2.1": one frame of 4096
 * bytes before 26.3, 4095 of them since. One frame for a text that is no version: what every macOS takes. */
uint32_t apple_max_message(const char *macos_version);

/* This machine's, such as "26.3"; empty where it cannot be read. */
const char *apple_macos_version(void);

#endif
