// Holds a CPU device for a given time without using a core.
//
// Arguments: one buffer, which is handed on unchanged (so that what follows
// really waits), the time in milliseconds, and the number of elements that it is
// for (0: for whatever comes).  XLA runs the call on a thread of its own, without
// Python's lock; two of them on two devices overlap.
#include <chrono>
#include <cstring>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static ffi::Error Hold(double milliseconds, double elements, ffi::AnyBuffer in,
                       ffi::Result<ffi::AnyBuffer> out) {
  if (elements > 0) {
    milliseconds *= static_cast<double>(in.element_count()) / elements;
  }
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
                                  .Attr<double>("elements")
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());
