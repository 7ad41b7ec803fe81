"""What engines on one device tell each other through shared memory: its layout, and who runs when.

Law: reads only; the engines write. The C++ twins are `patches/src/tools/server/gpu-share-*`; tests hold both
to one golden file.
"""
