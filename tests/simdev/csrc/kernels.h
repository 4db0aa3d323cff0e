// Running PyTorch's CPU kernels as kernels of the simulated device.
#pragma once

namespace simdev {

// Registers every operator that has a CPU kernel for sim, and returns how many. The fallback alone is not enough: it
// does not get operators that also have a composite version, and those would run piece by piece, rounding otherwise
// than the CPU does.
int take_cpu_operators();

}  // namespace simdev
