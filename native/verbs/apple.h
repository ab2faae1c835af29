/*
 * The rules of Apple's Thunderbolt devices that the library does not tell. They are rules of the device, which
 * its port's link layer identifies, and not of macOS: a card that another driver serves there has none of them.
 */
#pragma once

#include "verbs_abi.h"

/* The version of macOS is read as that of its kernel, Darwin: 25.3.0 is macOS 26.3, and from macOS 27 on both have the
 * same number. macOS reports 26 as "16" to a program, such as a Python, that was linked with an older SDK, but the
 * release of the kernel is the same for all programs. */

/* Corrects what query_port says of a port of `device`, under a release of Darwin such as "25.3.0". The link layer of
 * Thunderbolt is set where only the device's type shows it. The largest message, hence the largest buffer to post, is
 * there at most one frame of 4096 bytes before 25.3 (macOS 26.3), and 4095 of them up to 26. On macOS 27 larger
 * receives were seen to fail, and a larger SEND to arrive in packets: one frame there, and for what is not known. It
 * works everywhere. All of that counts only where no probe with a peer has found it (transport/peer_probe.h). */
void apple_correct_port(const struct ibv_device* device, const char* darwin_release, struct ibv_port_attr* attr);

/* This machine's release of Darwin; empty where it cannot be read. */
const char* apple_darwin_release(void);
