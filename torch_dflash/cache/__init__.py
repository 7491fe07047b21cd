"""What a layer of the target keeps between passes: dense buffers, pages or rings."""
