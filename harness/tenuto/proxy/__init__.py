"""The local proxy: ``tenuto run -- claude`` and ``tenuto proxy``. It infers hints from traffic that agents send anyway.

``server`` owns client connections, ``upstream`` those to the server behind, ``tracker`` the session tree and its hints,
``agents`` how each agent is started. Bodies pass through as bytes; whatever goes wrong in inference is counted and ignored.
"""
