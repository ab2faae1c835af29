/* What depends on the version of macOS, in RDMA over Thunderbolt. */
#pragma once

#include <stdint.h>

/* The version of macOS is read as that of its kernel, Darwin: 25.3.0 is macOS 26.3, and from macOS 27 on both have the
 * same number. macOS reports 26 as "16" to a program, such as a Python, that was linked with an older SDK, but the
 * release of the kernel is the same for all programs. */

/* The largest message, hence the largest buffer to post, under a release of Darwin such as "25.3.0": one frame of 4096
 * bytes before 25.3 (macOS 26.3), 4095 of them since. One frame for a text that is no release: what every macOS
 * takes. */
uint32_t apple_max_message(const char* darwin_release);

/* This machine's; empty where it cannot be read. */
const char* apple_darwin_release(void);
