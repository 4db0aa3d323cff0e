#pragma once

namespace simdev {

// Tells PyTorch about the device. Once in a process.
void register_hooks();

}  // namespace simdev
