"""HTTP and gRPC front: text in, text out."""
