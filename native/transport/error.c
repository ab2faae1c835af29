#include "error.h"
#include "mlxdist.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char last_error[ERROR_TEXT_BYTES];

int fail(int status, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error, sizeof last_error, format, arguments);
  va_end(arguments);
  return status;
}

const char *mlxdist_last_error(void) { return last_error; }
