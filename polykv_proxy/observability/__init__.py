"""What is measured, in the forms in which others read it.

Law: reads what runtime and core hold and changes nothing there; nothing here waits for the engine on behalf of a caller.
"""
