"""One file per operation: public function, torch reference, native kernels."""
