// Holds a CPU device for a given time without using a core.
//
// Arguments: one buffer, which is handed on unchanged (so that what follows
// really waits), and the time in milliseconds.  XLA runs the call on a thread
// of its own, without Python's lock; two of them on two devices overlap.
#include <chrono>
#include <cstring>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static ffi::Error Hold(double milliseconds, ffi::AnyBuffer in,
                       ffi::Result<ffi::AnyBuffer> out) {
  std::this_thread::sleep_for(
      std::chrono::duration<double, std::milli>(milliseconds));
  // The two are one buffer where XLA kept the aliasing that was asked for.
  if (out->untyped_data() != in.untyped_data()) {
    std::memcpy(out->untyped_data(), in.untyped_data(), in.size_bytes());
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(PathwaysLabHold, Hold,
                              ffi::Ffi::Bind()
                                  .Attr<double>("ms")
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());
