/* The text of an error, kept per thread until the next one. */
#pragma once

#define ERROR_TEXT_BYTES 1024

/* Stores the text for mlxdist_last_error() and returns `status`, so that callers write `return fail(...)`. */
int fail(int status, const char* format, ...) __attribute__((format(printf, 2, 3)));
