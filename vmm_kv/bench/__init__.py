"""Every way to size a KV cache around graphs, side by side: the same engine, model, ladder and device, real memory."""
